"""Small faults, each put into a copy of the package by itself: which test notices?"""
